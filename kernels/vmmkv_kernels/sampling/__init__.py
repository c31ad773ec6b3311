"""Sampling of token ids from logits on the device.

Offers `sample.sample` and `sample.argmax`, and in `logits` what is applied before them: penalties, biases and token masks.
The same in plain torch is in `vmmkv_kernels.reference`; read that first. `noise` has the arithmetic that both share to the bit.
"""
