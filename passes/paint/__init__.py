"""Deciding passes that colour nodes by facts, overrides and lists."""
