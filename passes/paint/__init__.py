"""Deciding passes that colour nodes by forced dtypes, overrides and op lists."""
