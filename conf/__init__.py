"""Every option of Longhaul: the schema in Python, and YAML files that hold only differences from it."""
