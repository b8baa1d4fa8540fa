"""Deciding passes that give nodes their formats (colours: low, high or plain) by forced dtypes, overrides and op lists."""
