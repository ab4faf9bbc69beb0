// The C ABI of the network and its threads. Functions that can fail return null or a message that stays valid until the next call
// on the same thread; nothing throws across the border.
#include <exception>
#include <string>

#include "cpu.h"
#include "network.h"
#include "sampling.h"
#include "thread_pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace foretoken {
namespace {

thread_local std::string message;

template <typename F>
const char* guarded(F&& act) {
  try {
    act();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace
}  // namespace foretoken

using foretoken::ChainRequest;
using foretoken::Network;
using foretoken::NetworkSpec;
using foretoken::RoundsRequest;
using foretoken::RunRequest;

// -1: no instruction set of ours runs here; else the best of 0 avx2, 1 avx512, 2 avx512_vnni, 3 avx512_bf16, 4 amx.
EXPORT int ft_isa() { return foretoken::detected_isa(); }

// Bytes of the structs that cross the border: another number than Python's, and the two were made from different sources.
EXPORT int ft_abi_bytes() {
  return int(sizeof(foretoken::PackedLinear) + sizeof(foretoken::LowRank) + sizeof(foretoken::Op) + sizeof(NetworkSpec) +
             sizeof(foretoken::RowStates) + sizeof(RunRequest) + sizeof(ChainRequest) + sizeof(RoundsRequest) +
             sizeof(foretoken::RoundsDrafter) + sizeof(foretoken::RoundsRow) + sizeof(foretoken::RoundsDraft) + sizeof(foretoken::SampleRow));
}

// The digest of the sources that this was compiled from, as setup.py gives it.
EXPORT const char* ft_sources() { return FT_SOURCES; }

EXPORT void ft_set_threads(int threads) { foretoken::ThreadPool::instance().resize(threads); }
EXPORT int ft_threads() { return foretoken::ThreadPool::instance().size(); }

EXPORT Network* ft_network_create(const NetworkSpec* spec) {
  const foretoken::Kernels* kernels = foretoken::kernels_of(spec->isa);
  Network* network = nullptr;
  if (kernels) foretoken::guarded([&] { network = new Network(*spec, *kernels); });
  return network;
}
EXPORT void ft_network_set_shortlist(Network* network, const foretoken::PackedLinear* weights) { network->set_shortlist(weights); }
EXPORT void ft_network_destroy(Network* network) { delete network; }
EXPORT int ft_network_most_at_once(const Network* network) { return network->most_at_once(); }
EXPORT int64_t ft_network_state_slot_bytes(const Network* network, int layer, int num_guesses) {
  return network->state_slot_bytes(layer, num_guesses);
}
EXPORT const char* ft_network_run(Network* network, const RunRequest* request) {
  return foretoken::guarded([&] { network->run(*request); });
}
EXPORT const char* ft_network_run_chain(Network* network, const ChainRequest* request) {
  return foretoken::guarded([&] { network->run_chain(*request); });
}
EXPORT const char* ft_network_run_rounds(Network* network, RoundsRequest* request) {
  return foretoken::guarded([&] { network->run_rounds(*request); });
}
