"""Compiling, interpreting and counting kernels; nothing here runs while serving."""
