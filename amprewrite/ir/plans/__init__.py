"""The cast plan and its pads as frozen data, versions of the file, and plans of several graphs shown once each."""
