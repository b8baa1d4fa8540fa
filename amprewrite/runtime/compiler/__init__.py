"""Work with Dynamo: compile a function with a new cache, suspend dispatch modes, handle code that Dynamo fails on, and write messages."""
