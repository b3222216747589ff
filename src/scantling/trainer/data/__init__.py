"""Data pipeline, from files to batches: sources, tokenizers, a cache of tokenized documents and a resumable sampler."""
