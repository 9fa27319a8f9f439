"""Configurations by name, such as `--config=quickstart`: each a file with `get_config()` to copy and change."""
