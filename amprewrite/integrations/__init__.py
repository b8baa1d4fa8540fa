"""Plugins for trainers and model loaders. Each module needs the library that it is named after."""
