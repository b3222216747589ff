"""From files to batches: sources, tokenizers, a cache of tokenised documents, and a resumable sampler."""
