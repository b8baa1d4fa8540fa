"""What every op does with a padded dim: one row an op."""
