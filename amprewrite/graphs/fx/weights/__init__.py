"""Low copies of weights: their lifetime and their memory."""
