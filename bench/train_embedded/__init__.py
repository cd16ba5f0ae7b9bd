"""Train the small embedded checkpoint: corpus, target, quantisation, DSpark draft, export.

`python -m dspark.bench.train_embedded --help` lists the phases. Everything here is plain PyTorch
on whole sequences, differentiable, and independent of the serving code; the exporter joins the two.
"""
