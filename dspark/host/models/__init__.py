"""Model classes SGLang finds by architecture name (registered as an external model package)."""
