"""Store and run the graphs that Dynamo captures of each called module. Capture them anew if hooks, weights or the plan change."""
