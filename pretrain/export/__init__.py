"""Models out to Hugging Face and in from there."""
