"""`dspark report`: one HTML page from the record of a run."""
