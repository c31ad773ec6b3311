"""Tools: functions that a chat's model may ask its client to call, and text that it writes before its answer.

    tools, choice ──> CallForm ──> text of the prompt, grammar of the calls
    text of the answer ──> AnswerReader ──> Reasoning, Content, CallBegun, CallArguments

A model writes a call in the form that its chat template shows. Each form is one module of `forms/`. Read `calls` first, then
`form`, then `reader`.
"""
