"""Tables of facts in rows (number formats, devices, ops), and shared definitions such as errors and enums."""
