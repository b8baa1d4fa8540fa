"""Low copies of weights: how long they live, and the memory they stand in."""
