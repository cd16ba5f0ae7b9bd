"""What a request may hold: one table of fields, and the places in SGLang where it is asked."""
