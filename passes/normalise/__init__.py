"""Before anything is decided: patterns written out by hand become the one op that they are."""
