"""DeepSpeed ZeRO-3 with Tidegate's engine: `enable_deepspeed`, its settings, state, norm and rounding."""
