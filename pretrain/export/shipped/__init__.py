"""Files that are copied beside exported weights; they import torch, transformers and one another, nothing of ours."""
