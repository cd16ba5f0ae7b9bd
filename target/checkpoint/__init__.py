"""The official DeepSeek-V4 checkpoint: its number formats, tensor names, reader and writer."""
