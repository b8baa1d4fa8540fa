"""Facts in rows, and the words that everything else speaks: errors, number formats, devices, ops."""
