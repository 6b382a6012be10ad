"""The client: an edge with the front of the model. Its images never leave it."""

from socflower import cloud_link, make_split_client_app
from split_app.task import load_samples, program

app = make_split_client_app(
    lambda context: program,
    lambda context, party, num_parties: load_samples(party, num_parties),
    link_fn=cloud_link,
)
