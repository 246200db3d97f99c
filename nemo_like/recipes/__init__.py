"""Jobs that run as they are: from options on the command line to a trained model."""

# The jobs and their purposes.
JOBS = {
    "pretrain": "train a decoder on text, byte by byte: on one device, or on many with torchrun",
    "finetune": "fine-tune a Hugging Face model on samples: on one device, or on many with torchrun",
}
