"""Tables of number formats, devices and ops, and shared definitions such as errors and enums."""
