"""Before anything is decided: replace patterns written out by hand by the one op that they compute."""
