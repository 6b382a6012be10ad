// Replays tasks on directed links in SimGrid and prints when each ends, in seconds, one line a task, in their order.
//
// Standard input has one entity a line, each before those that name it; N counts what follows it:
//   host NAME
//   link NAME LATENCY_S N (TIME_S BYTES_PER_S)...    bandwidths from these times on, the first from 0
//   route SOURCE TARGET N LINK...                    hosts, and the links between them in this direction
//   compute HOST SECONDS N TASK...                   after these tasks, by their number
//   transfer SOURCE TARGET BYTES N TASK...
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <simgrid/kernel/ProfileBuilder.hpp>
#include <simgrid/s4u.hpp>

namespace sg4 = simgrid::s4u;
namespace profile = simgrid::kernel::profile;

template <class Value> Value read(std::istream& line)
{
  Value value;
  if (not(line >> value))
    throw std::runtime_error("simgrid_replay: a line ends too early");
  return value;
}

void add_link(sg4::NetZone* zone, std::istream& line)
{
  const auto name      = read<std::string>(line);
  const auto latency_s = read<double>(line);
  const auto num_steps = read<int>(line);
  double first_bytes_per_s = 0.0;
  std::string steps;
  for (int step = 0; step < num_steps; step++) {
    const auto time_s      = read<std::string>(line);
    const auto bytes_per_s = read<std::string>(line);
    if (step == 0)
      first_bytes_per_s = std::stod(bytes_per_s);
    steps += time_s + " " + bytes_per_s + "\n";
  }
  auto* link = zone->create_link(name, first_bytes_per_s)->set_latency(latency_s);
  if (num_steps > 1)
    link->set_bandwidth_profile(profile::ProfileBuilder::from_string(name, steps, -1.0));
  link->seal();
}

void add_route(sg4::Engine& engine, sg4::NetZone* zone, std::istream& line)
{
  const auto* source   = engine.host_by_name(read<std::string>(line));
  const auto* target   = engine.host_by_name(read<std::string>(line));
  const auto num_links = read<int>(line);
  std::vector<sg4::LinkInRoute> links;
  for (int link = 0; link < num_links; link++)
    links.emplace_back(sg4::Link::by_name(read<std::string>(line)));
  zone->add_route(source->get_netpoint(), target->get_netpoint(), nullptr, nullptr, links, false);
}

sg4::ActivityPtr make_task(const sg4::Engine& engine, const std::string& kind, std::istream& line)
{
  auto* host = engine.host_by_name(read<std::string>(line));
  if (kind == "compute")
    return sg4::Exec::init()->set_flops_amount(read<double>(line))->set_host(host);
  auto* target = engine.host_by_name(read<std::string>(line));
  return sg4::Comm::sendto_init(host, target)->set_payload_size(read<std::uint64_t>(line));
}

int main(int argc, char* argv[])
{
  sg4::Engine engine(&argc, argv);
  auto* zone = sg4::create_full_zone("all");
  std::vector<sg4::ActivityPtr> tasks;
  std::string text;
  while (std::getline(std::cin, text)) {
    std::istringstream line(text);
    const auto kind = read<std::string>(line);
    if (kind == "host") {
      zone->create_host(read<std::string>(line), 1.0)->seal();
    } else if (kind == "link") {
      add_link(zone, line);
    } else if (kind == "route") {
      add_route(engine, zone, line);
    } else if (kind == "compute" or kind == "transfer") {
      const auto task      = make_task(engine, kind, line);
      const auto num_after = read<int>(line);
      for (int after = 0; after < num_after; after++) {
        auto& other = tasks.at(read<std::size_t>(line));
        if (auto* exec = dynamic_cast<sg4::Exec*>(other.get()))
          exec->add_successor(task);
        else
          dynamic_cast<sg4::Comm&>(*other).add_successor(task);
      }
      tasks.push_back(task);
    } else {
      throw std::runtime_error("simgrid_replay: no entity is called " + kind);
    }
  }
  zone->seal();
  for (const auto& task : tasks)
    task->vetoable_start();
  engine.run();
  for (const auto& task : tasks)
    std::printf("%.17g\n", task->get_finish_time());
  return 0;
}
