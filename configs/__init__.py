"""Configurations by name, such as `--config=quickstart`: each is a file with a `get_config()` to copy and change."""
