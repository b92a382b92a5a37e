"""Architectures of keras.applications, torchvision, timm, transformers and PEFT, saved and loaded: `scripts/models`."""
