"""The HTTP server: OpenAI's API, the page, metrics. Read `app` first.

app          routes, and a request's way from its body to its answer
schemas      request bodies
generation   from a request to text as it comes
responses    response bodies
limits       admission: keys, the queue, bodies
errors       errors in OpenAI's form
page         the page at `/` and its stream of events
"""
