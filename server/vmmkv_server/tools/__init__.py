"""Tools: functions that a chat's model may ask its client to call, and text that it writes before its answer.

    messages, tools, choice ── ToolChatFormat ──> ToolChatPrompt: token ids, grammar of the calls
    text of the answer ── PartReader ──> Reasoning, Content, CallBegun, CallArguments

A model writes a call in the form that its chat template shows. Each form is one module of `forms/`. Read `calls` first, then
`chat_format`, `form` and `reading`.
"""
