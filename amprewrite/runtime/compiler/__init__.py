"""What we must know of Dynamo: compiling afresh, code that it fails on, and what users read about it."""
