"""Facts about a model's numbers: value ranges, constants, counts, torch.autocast's formats, colours of other graphs, search results."""
