"""The HTTP server over vmmkv: an OpenAI-shaped API in one process, the engine in another.

`launch.run` starts both. This process does HTTP, tokenising and detokenising (`app`, `tokenizer`, `detokenize`);
`engine` alone launches kernels and maps memory, since a busy Python thread beside a driver call makes it a hundred
times dearer. They speak `protocol` over one local socket.
"""
