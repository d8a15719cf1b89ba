// Captures as recorded lists of work with what each comes after, graphs made of them, and their replays.
#include <algorithm>

#include "runtime.h"

namespace fake {
namespace {

struct Graph {
  std::vector<Node> nodes;
};


uint64_t last_id = 0;
std::set<std::shared_ptr<Capture>> going_on;
std::set<Graph *> graphs;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local std::set<Capture *> own;  // captures that this thread began

bool is_refused() {
  for (const auto &capture : going_on) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool here = own.count(capture.get());
    if (mode == cudaStreamCaptureModeGlobal && (here || capture->mode == cudaStreamCaptureModeGlobal)) return true;
    if (mode == cudaStreamCaptureModeThreadLocal && here) return true;
  }
  return false;
}

cudaError_t invalidate(const std::shared_ptr<Capture> &capture, const char *) {
  capture->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

// Every stream that took part is free again.
void end(const std::shared_ptr<Capture> &capture) {
  going_on.erase(capture);
  own.erase(capture.get());
  for (int device = 0; device < kDevices; ++device)
    for (const auto &stream : streams_of(device))
      if (stream->capture == capture) stream->capture.reset();
}

std::set<size_t> with_all_before(const Capture &capture, std::set<size_t> ends) {
  std::vector<size_t> left(ends.begin(), ends.end());
  while (!left.empty()) {
    const size_t node = left.back();
    left.pop_back();
    for (const size_t before : capture.nodes[node].after)
      if (ends.insert(before).second) left.push_back(before);
  }
  return ends;
}

bool is_joined(const Capture &capture) {
  const auto found = capture.ends.find(capture.origin.get());
  const auto all = with_all_before(capture, found == capture.ends.end() ? std::set<size_t>() : found->second);
  for (const auto &[stream, ends] : capture.ends)
    for (const size_t node : ends)
      if (!all.count(node)) return false;
  return true;
}

// Any order that the graph permits.
std::vector<size_t> some_order(const Graph &graph) {
  std::vector<size_t> order;
  std::vector<bool> done(graph.nodes.size());
  while (order.size() < graph.nodes.size()) {
    std::vector<size_t> ready;
    for (size_t k = 0; k < graph.nodes.size(); ++k)
      if (!done[k] && std::all_of(graph.nodes[k].after.begin(), graph.nodes[k].after.end(),
                                  [&](size_t before) { return (bool)done[before]; }))
        ready.push_back(k);
    order.push_back(ready[draw(ready.size())]);
    done[order.back()] = true;
  }
  return order;
}

Graph *graph_of(void *handle) {
  const auto found = graphs.find((Graph *)handle);
  return found == graphs.end() ? nullptr : *found;
}

}  // namespace

// Of a whole device, with whatever its streams capture: no mode permits that.
cudaError_t refuse_beside_captures(const char *call) {
  if (going_on.empty()) return cudaSuccess;
  for (const auto &capture : going_on) invalidate(capture, call);
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_in_capture(const char *call) {
  if (!is_refused()) return cudaSuccess;
  for (const auto &capture : going_on) invalidate(capture, call);
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_in_capture(const std::shared_ptr<Stream> &stream, const char *call) {
  return stream->capture ? invalidate(stream->capture, call) : refuse_in_capture(call);
}

void record_node(const std::shared_ptr<Stream> &stream, Work work) {
  Capture &capture = *stream->capture;
  std::set<size_t> &ends = capture.ends[stream.get()];
  capture.nodes.push_back({std::move(work), ends});
  ends = {capture.nodes.size() - 1};
}

}  // namespace fake

using namespace fake;

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *other) {
  std::swap(mode, *other);
  return cudaSuccess;
}

API int cuThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *other) {
  return cudaThreadExchangeStreamCaptureMode(other);
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode wanted) {
  const Lock lock;
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (stream == legacy_stream(stream->device)) return fail(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return fail(cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++last_id;
  stream->capture->mode = wanted;
  stream->capture->origin = stream;
  stream->capture->ends[stream.get()] = {};
  going_on.insert(stream->capture);
  own.insert(stream->capture.get());
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  const Lock lock;
  const auto stream = stream_of(handle);
  *graph = nullptr;
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  const auto capture = stream->capture;
  if (!capture || capture->origin != stream) return fail(cudaErrorStreamCaptureUnmatched);
  end(capture);
  if (capture->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  if (!is_joined(*capture)) return fail(cudaErrorStreamCaptureUnjoined);
  auto *const made = new Graph{std::move(capture->nodes)};
  graphs.insert(made);
  *graph = (cudaGraph_t)made;
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  const Lock lock;
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *status = !stream->capture           ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *count) {
  const Lock lock;
  if (const cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  const auto stream = stream_of(handle);
  if (id) *id = stream->capture ? stream->capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *count) {
  const Lock lock;
  const Graph *const graph = graph_of(handle);
  if (!graph || nodes) return fail(cudaErrorInvalidValue);
  *count = graph->nodes.size();
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t handle, unsigned long long) {
  const Lock lock;
  const Graph *const graph = graph_of(handle);
  if (!graph) return fail(cudaErrorInvalidValue);
  auto *const made = new Graph(*graph);
  graphs.insert(made);
  *executable = (cudaGraphExec_t)made;
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  const Lock lock;
  const Graph *const graph = graph_of(handle);
  const auto stream = stream_of(stream_handle);
  if (!graph || !stream) return fail(cudaErrorInvalidValue);
  use(stream->device);
  for (const size_t k : some_order(*graph))
    if (const cudaError_t error = push(stream, graph->nodes[k].work)) return error;
  return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  const Lock lock;
  Graph *const graph = graph_of(handle);
  if (!graph) return fail(cudaErrorInvalidValue);
  graphs.erase(graph);
  delete graph;
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) { return cudaGraphDestroy((cudaGraph_t)handle); }
