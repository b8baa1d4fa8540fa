"""Low copies of weights: make them, keep and drop them, compare them with their weights, and link them by autograd."""
