"""Integration with DeepSpeed ZeRO-3: `enable_deepspeed`, its settings, state, gradient norm and rounding."""
