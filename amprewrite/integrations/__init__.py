"""amprewrite as a plugin of trainers and loaders. Each file needs the library of its name."""
