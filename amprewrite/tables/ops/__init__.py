"""What is known of every op: its kind and why, its spellings, and what each preset list says of it."""
