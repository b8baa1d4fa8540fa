"""Facts in rows, and the shared vocabulary: errors, number formats, devices, ops."""
