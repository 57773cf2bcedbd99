"""Integrations with training frameworks: DDP, DeepSpeed, Hugging Face Trainer and Accelerate, Lightning."""
