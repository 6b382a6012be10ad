// kernel_test [path]: every suite on every path this machine can run, or on one of them; --paths names the paths
// that are compiled in.
#include "kernel_test.h"

#include "paths/registry.h"

int main(int argc, char** argv) {
  using namespace socflower::int8;
  const char* wanted = argc > 1 ? argv[1] : nullptr;
  const Paths available = available_paths();
  int num_compiled = 0, matched = 0;
  const char* const* names = compiled_path_names(&num_compiled);
  const bool list = wanted != nullptr && std::strcmp(wanted, "--paths") == 0;
  for (int n = 0; n < num_compiled; ++n) {
    if (list) {
      std::printf("%s\n", names[n]);
      ++matched;
      continue;
    }
    if (wanted != nullptr && std::strcmp(wanted, names[n]) != 0) continue;
    ++matched;
    const Path* const* end = available.begin + available.count;
    const Path* const* path =
        std::find_if(available.begin, end, [&](const Path* p) { return std::strcmp(p->name, names[n]) == 0; });
    if (path == end) {
      std::printf("%-12s compiled, not executed: this machine lacks its instructions\n", names[n]);
      continue;
    }
    test::Checker check(names[n]);
    for (const test::Suite suite : test::suites()) suite(**path, check);
    std::printf("%-12s %ld checks\n", names[n], check.checks());
    std::fflush(stdout);
  }
  if (matched == 0) {
    std::printf("no path named %s is compiled in\n", wanted != nullptr ? wanted : "anything");
    return 1;
  }
  return 0;
}
