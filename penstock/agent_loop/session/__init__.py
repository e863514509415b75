"""Any agent through an endpoint: it speaks to the API it knows, and what the model says is on record.

tree.py            which answer on record a request goes on from
placing.py         where in the rollout's segments its tokens belong
session.py         Session: the conversations of one rollout, on record in its transcript
reply.py           one answer as it is made
text_stream.py     its text as its tokens are made
requests.py        what a client asks for, whatever wire it came over
wire_openai.py     OpenAI's wire
wire_anthropic.py  Anthropic's wire
exchange.py        one HTTP request and its response
app.py             the routes
server.py          SessionServer: a socket, and a key for each session
alone.py           EngineServer: the endpoint over an engine alone
agents.py          the agent outside: a function, a program, a service
launch.py          the program that becomes an agent's
"""
