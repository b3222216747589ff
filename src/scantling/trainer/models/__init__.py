"""Models: named presets, and any transformers architecture from a configuration or a folder."""
