"""An edge held to a part of a core and a cloud, as processes that train together over a link of a set speed."""
