"""The HTTP server: OpenAI's API, the page, metrics. Read `generation` first.

app          the application: routes, and the middleware before them
generation   a request's way from its body to its answer
wire         the base of request bodies
schemas      request bodies
tools        tools and reasoning in request bodies and answers
responses    text of answers as it comes, and response bodies
responses_api  OpenAI's Responses API, on chats
limits       admission: origins, hosts, keys, the queue, bodies
edge         HEAD, clients that do not read or end their side, no descriptors; a server works without it
errors       errors in OpenAI's form
page         the page at `/` and its stream of events
"""
