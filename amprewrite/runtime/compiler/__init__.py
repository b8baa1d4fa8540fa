"""Our knowledge of Dynamo: compiling afresh, dispatch modes, code that it fails on, and messages about it."""
