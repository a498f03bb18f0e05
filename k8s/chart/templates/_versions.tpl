{{- /* The API version of a kind of Kueue: the given one, else the newest that the cluster serves, else v1beta2. */ -}}
{{- define "scaletrain.kueue" -}}
{{- $has := .root.Capabilities.APIVersions -}}
{{- if .root.Values.kueue.apiVersion -}}
{{ .root.Values.kueue.apiVersion }}
{{- else if $has.Has (printf "kueue.x-k8s.io/v1beta2/%s" .kind) -}}
kueue.x-k8s.io/v1beta2
{{- else if $has.Has (printf "kueue.x-k8s.io/v1beta1/%s" .kind) -}}
kueue.x-k8s.io/v1beta1
{{- else if and (eq .kind "Topology") ($has.Has "kueue.x-k8s.io/v1alpha1/Topology") -}}
kueue.x-k8s.io/v1alpha1
{{- else -}}
kueue.x-k8s.io/v1beta2
{{- end -}}
{{- end -}}
