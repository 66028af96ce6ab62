"""The image: its plan, and the image itself."""
