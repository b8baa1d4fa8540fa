"""Handle weights that are not plain fp32 (half before the rewrite, frozen, or gathered low), and find out how graphs read weights."""
